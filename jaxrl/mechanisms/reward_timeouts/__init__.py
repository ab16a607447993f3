"""Time limits of test cases that follow what right programs take (RollPacker §4.3)."""
