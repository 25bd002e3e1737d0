"""PURE. Virtual time around the production objects: the same dispatcher and engine core, no Ray, sockets or torch."""
