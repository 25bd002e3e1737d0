"""PURE. One data-parallel engine: scheduler, KV block manager, model runner and their service.

Imports nothing of `router` or `cluster`. What other packages may import of it is the contract:
`replica.messages`, `replica.block_hash`, `replica.errors`.
"""
