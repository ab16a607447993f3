"""Rollout on a mesh: the executor behind the engine, its KV cache and its sampling."""
