"""What tests of several parts need: real services and real trainers, started and ended."""
