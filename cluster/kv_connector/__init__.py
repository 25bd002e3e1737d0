"""PURE. The KVConnector of a node: every KV block that is not in a replica's own pool. `docs/kv_connector.md`."""
