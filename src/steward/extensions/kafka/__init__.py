"""Kafka as a sink: how a cluster is reached, and the topic that scripts are sent to."""
