"""What is done to a cluster, by people and by rules: operations, and rules that run them."""
