"""Pictures of layouts, collectives, schedules and plans: functions of data that return matplotlib Axes."""
