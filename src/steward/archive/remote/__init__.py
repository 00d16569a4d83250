"""Remote sinks: one consumer that archives scripts to Elasticsearch, OpenSearch or Kafka."""
