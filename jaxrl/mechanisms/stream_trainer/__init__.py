"""Gradients on half of the devices, while the others decode (RollPacker §4.4)."""
