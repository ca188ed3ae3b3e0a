"""Pictures of layouts and collectives by matplotlib: functions of data, with an optional ``ax``, that return Axes."""
