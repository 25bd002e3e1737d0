"""PURE. Admission, placement and the OpenAI-compatible edge of the cluster.

Imports only the contract of `replica` (messages, block_hash, errors) and nothing of `cluster`.
"""
