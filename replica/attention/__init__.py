"""TORCH. Paged attention: one contract (`contract.py`), several kernels, and the table that picks one (`select.py`)."""
