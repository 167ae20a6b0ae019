"""OpenTelemetry, reached from here only: traces, metrics, and trace ids in log lines."""
