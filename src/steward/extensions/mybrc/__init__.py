"""The myBRC REST API, served to the plugins that speak it, and spoken to a server elsewhere."""
