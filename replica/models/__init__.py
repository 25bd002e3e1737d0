"""TORCH. Model families. A family turns a config and a folder of tensors into a `Decoder`."""
