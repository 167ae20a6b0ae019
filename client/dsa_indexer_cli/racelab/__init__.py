"""Races on purpose, of every kind that the detectors know, and clean steps for false alarms."""
