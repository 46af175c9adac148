"""Flow control: who waits, who goes next, who is turned away. Start reading in `controller.py`."""
