"""Inputs of calibrated methods: texts and chats, and a model layer by layer."""
