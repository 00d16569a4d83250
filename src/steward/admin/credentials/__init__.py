"""Credentials for the web pages and the API: login links, browser sessions, tokens, tickets."""
