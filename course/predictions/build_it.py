"""The prediction of notebook 18, build it."""

from course.predict import Number

faults_missed = Number(
    "18.faults_missed",
    "Eleven faults are planted into your file, one after the other. Each time, 8 ranks train, and one rank trains, "
    "both with the fault, and you compare their losses and norms. With how many of the eleven are they equal?",
    {
        0: "A fault that one rank has too, in the same way, changes both sides alike.",
        2: "Think of faults of the model (two), of the loss, and of messages that only NCCL holds up.",
        11: "Most of these faults do something only where the work is split: one rank trains rightly with them.",
    },
)
