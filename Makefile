# One vocabulary for people and machines: every target is a script of the same name in scripts/, and CI calls them too.
# ARGS goes through: make serve ARGS="--replicas 2". Everything is installed into .venv on first use.
.DEFAULT_GOAL := help
.PHONY: help setup serve test check bench claims soak clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' Makefile

setup: ## create .venv, install, fetch and convert the default model
	@scripts/setup

serve: ## start a cluster on this machine and serve the default model; ARGS="--replicas 2 --port 8000"
	@scripts/serve $(ARGS)

test: ## lint, types, then the test tiers; TIERS="unit simulation" for some, ARGS goes to pytest
	@TIERS="$(TIERS)" scripts/test $(ARGS)

check: ## lint, format, types, import arrows
	@scripts/check

bench: ## throughput, TTFT and gaps over HTTP at concurrency 1, 8, 32
	@scripts/bench $(ARGS)

claims: ## prove what the README claims; ONLY=engine for one group, FULL=1 for the long form
	@scripts/claims $(if $(ONLY),--only $(ONLY)) $(if $(FULL),--full) $(ARGS)

soak: ## hours of load with faults; ARGS="--minutes 60"
	@scripts/soak $(ARGS)

clean: ## remove caches and build outputs; ALL=1 also .venv
	@scripts/clean $(if $(ALL),--all)
