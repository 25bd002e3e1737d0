"""PURE. The KVConnector of a node: blocks of KV outside of the replicas' pools (`docs/kv_connector.md`)."""
