"""Order and completion of operations: queues, the poller, Works, the watchdog, profiler events."""
