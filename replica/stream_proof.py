"""PURE. How a router shows a replica that it belongs to the cluster: by the cluster's token, which is never sent.

The proof is bound to the router's name and to the incarnation of the replica, so that it is worth nothing elsewhere. It
does not encrypt: whoever can read the network between pods can read prompts, and show a proof again that it saw.
"""

from __future__ import annotations

import hashlib
import hmac

#: gRPC metadata
PROOF_KEY = "cluster-proof"


def proof(token: bytes, router_id: str, incarnation: str) -> str:
    """What goes into the metadata of a stream."""
    said = f"shoal-router\0{router_id}\0{incarnation}".encode()
    return hmac.digest(token, said, hashlib.sha256).hex()


def is_proof(shown: str | bytes, token: bytes, router_id: str, incarnation: str) -> bool:
    """In constant time."""
    given = shown if isinstance(shown, bytes) else shown.encode()
    return hmac.compare_digest(given, proof(token, router_id, incarnation).encode())
