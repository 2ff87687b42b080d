"""Configuration files, as package data."""
