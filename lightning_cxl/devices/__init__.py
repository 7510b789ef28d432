"""Device types, and copies between device and host: the only owner of streams and events."""
