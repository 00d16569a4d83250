"""Optional extensions, each loaded by its entry point: Kafka, Torque, search servers and more."""
