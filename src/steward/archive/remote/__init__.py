"""Sinks on other machines: Elasticsearch, OpenSearch, Kafka; one consumer, a destination each."""
