"""Real servers for the tests: Kafka, Elasticsearch and OpenSearch, on loopback.

Each is a JVM of bounded memory on ports of its own, which can be killed and
started again on the same data, and which ends when the tests do, however they
end. versions.toml says what they are; jars.py brings them here.
"""
