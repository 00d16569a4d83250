"""What other Stewards have sent to a Kafka topic, taken in as if it had been captured here."""
