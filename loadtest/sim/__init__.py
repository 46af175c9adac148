"""The simulated model servers. They see the picker only from outside."""
