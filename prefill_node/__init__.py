"""Turns prompts into KV blocks, chunk by chunk, and offers them to decode nodes."""
