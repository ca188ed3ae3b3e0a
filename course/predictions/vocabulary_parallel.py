"""The predictions of notebook 05, in its order."""

from course.predict import Choice, Number

num_rows = Number(
    "05.num_rows",
    "10 words, t = 3. Every rank has a table of the same size. How many rows does it have?",
    {
        3: "3 · 3 = 9. Who has the tenth word?",
        (lambda answer: 3 < answer < 4): "A rank has whole rows.",
        10: "That is the whole table.",
        12: "That is how many rows the three ranks have together.",
    },
)

sent_for_logits = Choice(
    "05.sent_for_logits",
    "The output layer has `gather_output=False`, so the logits stay where they are. What is sent?",
    {
        "[[], []]": "Nothing at all",
        "[['all_gather'], []]": "An all-gather forward, nothing backward",
        "[['all_reduce'], []]": "An all-reduce forward, nothing backward",
        "[[], ['all_reduce']]": "Nothing forward, an all-reduce backward",
    },
    {
        "[[], []]": "Every rank used the hidden states. Who adds up their gradients?",
        "[['all_gather'], []]": "That joins the logits.",
        "[['all_reduce'], []]": "That is a row layer, such as the embedding.",
    },
)

numbers_per_token = Choice(
    "05.numbers_per_token",
    "32,768 words on 4 ranks, which may only add up and take maxima. "
    "How many numbers does a rank have to give for each token?",
    {
        "none": "None",
        "few": "Fewer than 10",
        "slice": "8,192, its own logits",
        "all": "32,768, all logits",
    },
    {
        "none": "The sum runs over all words, and a rank has only its own.",
        "slice": "It can add up the exponentials of its own words by itself.",
        "all": "It has only a quarter of them. And do the others need each one?",
    },
)
