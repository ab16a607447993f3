"""Prompts that teach nothing are left out and replaced by others (DAPO §3.2; RollPacker §7)."""
