"""Differential privacy around any method whose reducer is a mean of client updates."""
