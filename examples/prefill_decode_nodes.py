"""Two Ray nodes on this host: prompts are computed on one, answers go on at the other, and KV crosses TCP in between.

    python -m examples.prefill_decode_nodes

Each node has a KV connector with an arena of its own and a loopback address of its own where Ray takes one (Linux:
127.0.0.2). It ends with an error if no bytes crossed TCP.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from pathlib import Path

import aiohttp
import msgspec

from benchmarks import servers
from benchmarks.load import ask
from benchmarks.two_nodes import two_nodes
from examples.prefill_decode import figures, settled, wait_ready

NUM_TOKENS = 1024


class Crossing(msgspec.Struct, frozen=True):
    """What one request moved, and where its replicas are."""

    num_loaded: int
    remote_bytes: int
    #: address by role
    hosts: dict[str, str]


async def cross(url: str, model: str, num_tokens: int = NUM_TOKENS) -> Crossing:
    """Send one request. Raises RuntimeError if the nodes gave each other nothing."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        await wait_ready(session, url)
        await wait_for_peers(session, url)
        before = await figures(session, url)
        rng = random.Random(7)
        answer = await ask(session, url, model, [rng.randrange(1000, 40000) for _ in range(num_tokens)], 8)
        if answer.error:
            raise RuntimeError(f"the request failed: {answer.error}")
        found = await settled(session, url, before, num_tokens // 16)
        num_quiet = 0
        while num_quiet < 25:  # a connector tells of itself each second
            await asyncio.sleep(0.1)
            now = (await figures(session, url)).since(before)
            num_quiet = num_quiet + 1 if now == found else 0
            found = now
        if found.remote_bytes > 0:
            async with session.get(f"{url}/status") as response:
                up = [one for one in (await response.json())["replicas"] if one["state"] == "up"]
            hosts = {one["role"]: one["address"].rpartition(":")[0] for one in up}
            return Crossing(int(found.num_loaded), int(found.remote_bytes), hosts)
    raise RuntimeError(
        f"no bytes crossed TCP: {found.num_remote:.0f} tokens went to the prefill replica, {found.num_loaded:.0f} "
        "blocks were taken over; are both replicas on one node?"
    )


async def wait_for_peers(session: aiohttp.ClientSession, url: str) -> None:
    """Until each connector hears the other. Raises TimeoutError after a minute."""
    for _ in range(600):
        async with session.get(f"{url}/status") as response:
            replicas = (await response.json())["replicas"]
        if sum(one["counters"].get("tier_peers", 0) for one in replicas) >= 2:
            return
        await asyncio.sleep(0.1)
    raise TimeoutError("the connectors of the two nodes did not find each other within a minute")


def run(*serve_args: str, second_host: str | None = "127.0.0.2") -> Crossing:
    """Nodes, cluster, request. On each node is room for one replica: the first one has a CPU more, for the router."""
    room = ("--set", "num_cpus_per_replica=2", "--set", "disaggregation.decision=always")
    with tempfile.TemporaryDirectory() as folder, two_nodes(3, second_host) as nodes:
        roles = ("--prefill", "1", "--decode", "1")
        server = servers.shoal(Path(folder), *roles, *room, *serve_args, env=nodes.env)
        with server:
            return asyncio.run(cross(server.url, server.model))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--second-host", default="127.0.0.2", help="loopback address of the second node")
    options = parser.parse_args()
    found = run(second_host=options.second_host)
    hosts = ", ".join(f"{role} {host}" for role, host in sorted(found.hosts.items()))
    print(f"{hosts}: {found.num_loaded} blocks taken over, {found.remote_bytes / 1e6:.1f} MB crossed TCP")


if __name__ == "__main__":
    main()
