"""What goes between processes: messages, their encoding, endpoints, membership, configuration."""
