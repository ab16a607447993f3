"""Token level: requests, plans, KV blocks, continuous batching, and the engine over an executor."""
