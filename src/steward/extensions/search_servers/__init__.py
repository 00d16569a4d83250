"""Elasticsearch and OpenSearch: scripts as documents of monthly indices, and asking for them."""
