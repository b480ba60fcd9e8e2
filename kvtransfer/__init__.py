"""The hand-off of KV blocks between two nodes: offer (source), pull (destination), copy and verify."""
