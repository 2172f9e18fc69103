"""Rows become requests: templates, chats, tokens, truncation. Never imports torch."""
