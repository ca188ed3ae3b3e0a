"""Pictures of layouts, collectives, schedules and plans: functions of data that return a Scene or a Plot."""
