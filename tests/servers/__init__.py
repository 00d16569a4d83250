"""Real servers for the tests: Kafka, Elasticsearch and OpenSearch, on loopback.

Each is a JVM with bounded memory and its own ports. Tests can kill it and start it again on the
same data, and it ends with the tests, even if they are killed. versions.toml pins the versions,
and jars.py downloads them.
"""
