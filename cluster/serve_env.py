"""PURE. Environment that Serve reads when its processes start. Why: `docs/architecture.md`, "Ray Serve settings"."""

from __future__ import annotations

SERVE_ENV = {
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "router.proxy_guard.middlewares",
}
