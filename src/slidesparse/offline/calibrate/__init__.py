"""What calibrated methods read: texts and chats, and a model layer by layer."""
