"""When to save and when to go back: arithmetic on facts that others gather, without torch and storage."""
