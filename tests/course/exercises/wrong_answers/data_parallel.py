"""Answers to the exercises on data parallel."""

import torch
import torch.distributed as dist


def added_up(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def sums(gradients):
    return [added_up(gradient) for gradient in gradients]


def changed_in_place(gradients):
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def result_of_all_reduce(gradients):
    return [dist.all_reduce(gradient) / dist.get_world_size() for gradient in gradients]


def divided_before_and_after(gradients):
    n = dist.get_world_size()
    return [added_up(gradient / n) / n for gradient in gradients]


def divided_by_number_of_tensors(gradients):
    return [added_up(gradient) / len(gradients) for gradient in gradients]


def four_ranks_written_in(gradients):
    return [added_up(gradient) / 4 for gradient in gradients]


def returns_inside_the_loop(gradients):
    averages = []
    for gradient in gradients:
        averages.append(added_up(gradient) / dist.get_world_size())
        return averages


def no_messages(gradients):
    return [gradient / dist.get_world_size() for gradient in gradients]


def only_rank_0_has_the_sum(gradients):
    for gradient in gradients:
        dist.reduce(gradient, dst=0)
        gradient /= dist.get_world_size()
    return gradients


def never_waits(gradients):
    requests = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
    return [gradient / dist.get_world_size() for gradient, _ in zip(gradients, requests)]


def new_tensors_under_the_name_of_the_loop(gradients):
    for g in gradients:
        dist.all_reduce(g)
        g = g / dist.get_world_size()
    return gradients


def average_in_place(gradients):
    for gradient in gradients:
        gradient.div_(dist.get_world_size())
    for request in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
        request.wait()
    return gradients


def buckets_of(gradients, is_full):
    buckets, bucket = [], []
    for gradient in gradients:
        bucket.append(gradient)
        if is_full(bucket):
            buckets.append(bucket)
            bucket = []
    return [*buckets, bucket] if bucket else buckets


def sent(bucket):
    """One message for a bucket; its averages, in the shapes of the gradients."""
    flat = added_up(torch.cat([gradient.flatten() for gradient in bucket])) / dist.get_world_size()
    pieces = flat.split([gradient.numel() for gradient in bucket])
    return [piece.view(gradient.shape) for piece, gradient in zip(pieces, bucket)]


def num_elements(bucket):
    return sum(gradient.numel() for gradient in bucket)


def bucketed(gradients, is_full):
    return [average for bucket in buckets_of(gradients, is_full) for average in sent(bucket)]


def one_message_for_each(gradients, bucket_size):
    return bucketed(gradients, lambda bucket: True)


def one_bucket_for_all(gradients, bucket_size):
    return sent(gradients)


def bucket_counts_tensors(gradients, bucket_size):
    return bucketed(gradients, lambda bucket: len(bucket) >= bucket_size)


def full_is_more_than_its_size(gradients, bucket_size):
    return bucketed(gradients, lambda bucket: num_elements(bucket) > bucket_size)


def bucket_counts_rows(gradients, bucket_size):
    return bucketed(gradients, lambda bucket: sum(len(gradient) for gradient in bucket) >= bucket_size)


def last_bucket_stays(gradients, bucket_size):
    buckets = buckets_of(gradients, lambda bucket: num_elements(bucket) >= bucket_size)
    done = [average for bucket in buckets if num_elements(bucket) >= bucket_size for average in sent(bucket)]
    return done + gradients[len(done) :]


def sends_before_it_is_full(gradients, bucket_size):
    averages, bucket = [], []
    for gradient in gradients:
        if bucket and num_elements(bucket) + gradient.numel() > bucket_size:
            averages += sent(bucket)
            bucket = []
        bucket.append(gradient)
    return averages + sent(bucket)


def sums_in_buckets(gradients, bucket_size):
    averages = bucketed(gradients, lambda bucket: num_elements(bucket) >= bucket_size)
    return [average * dist.get_world_size() for average in averages]


def flat_averages(gradients, bucket_size):
    return [average.flatten() for average in bucketed(gradients, lambda bucket: num_elements(bucket) >= bucket_size)]


def from_the_last_to_the_first(gradients, bucket_size):
    return bucketed(gradients[::-1], lambda bucket: num_elements(bucket) >= bucket_size)[::-1]


def bucketed_by_offsets(gradients, bucket_size):
    results, start = [torch.empty_like(gradient) for gradient in gradients], 0
    for end in range(1, len(gradients) + 1):
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients[start:end]])
        if len(flat) >= bucket_size or end == len(gradients):
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for result in results[start:end]:
                result.copy_(flat[: result.numel()].reshape(result.shape))
                flat = flat[result.numel() :]
            start = end
    return results


def unequal(gradient, num_rows):
    """The sum of gradient times rows over all ranks, and all rows."""
    both = torch.cat([gradient.flatten() * num_rows, gradient.new_tensor([num_rows])])
    both = added_up(both)
    return both[:-1].view(gradient.shape), both[-1]


def mean_of_the_means(gradient, num_rows):
    return added_up(gradient) / dist.get_world_size()


def ten_rows_written_in(gradient, num_rows):
    return unequal(gradient, num_rows)[0] / 10


def divided_by_own_rows(gradient, num_rows):
    return unequal(gradient, num_rows)[0] / (num_rows * dist.get_world_size())


def never_divided(gradient, num_rows):
    return unequal(gradient, num_rows)[0]


def divided_by_ranks_too(gradient, num_rows):
    total, rows = unequal(gradient, num_rows)
    return total / rows / dist.get_world_size()


def empty_ranks_stay_away(gradient, num_rows):
    if num_rows == 0:
        return torch.zeros_like(gradient)
    total, rows = unequal(gradient, num_rows)
    return total / rows


def own_share_only(gradient, num_rows):
    return gradient * num_rows / unequal(gradient, num_rows)[1]


def mean_over_busy_ranks(gradient, num_rows):
    is_busy = added_up(torch.tensor(float(num_rows > 0)))
    return added_up(gradient) / is_busy


def weighted_average(gradient, num_rows):
    rows = torch.tensor(num_rows, dtype=torch.int64)
    dist.all_reduce(rows)
    gradient = gradient * (num_rows / rows.item())
    dist.all_reduce(gradient)
    return gradient


def average_1(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    for gradient in gradients:
        dist.all_reduce(gradient)
    return gradients


def average_2(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    return [dist.all_reduce(gradient / dist.get_world_size()) for gradient in gradients]


def average_3(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    averages = []
    for gradient in gradients:
        total = gradient.clone()
        dist.all_reduce(total)
        averages.append(total / len(gradients))
    return averages


def average_4(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    averages = []
    for gradient in gradients:
        dist.all_reduce(gradient)
        averages.append(gradient / 4)
    return averages


def bucketed_average_1(gradients: list, bucket_size: int) -> list:
    averages, bucket, count = [], [], 0
    for gradient in gradients:
        bucket.append(gradient)
        count += gradient.numel()
        if count >= bucket_size:
            flat = torch.cat([g.flatten() for g in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            parts = flat.split([g.numel() for g in bucket])
            averages += [part.view_as(g) for part, g in zip(parts, bucket)]
            bucket, count = [], 0
    return averages


def bucketed_average_2(gradients: list, bucket_size: int) -> list:
    buckets, count = [[]], 0
    for gradient in gradients:
        if buckets[-1] and count + gradient.numel() > bucket_size:
            buckets.append([])
            count = 0
        buckets[-1].append(gradient)
        count += gradient.numel()
    averages = []
    for bucket in buckets:
        flat = torch.cat([g.reshape(-1) for g in bucket])
        dist.all_reduce(flat)
        flat = flat / dist.get_world_size()
        parts = flat.split([g.numel() for g in bucket])
        averages += [part.view(g.shape) for part, g in zip(parts, bucket)]
    return averages


def bucketed_average_3(gradients: list, bucket_size: int) -> list:
    averages = []
    for start in range(0, len(gradients), bucket_size):
        bucket = gradients[start : start + bucket_size]
        flat = torch.cat([g.flatten() for g in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for g in bucket:
            averages.append(flat[: g.numel()].view(g.shape))
            flat = flat[g.numel() :]
    return averages


def bucketed_average_4(gradients: list, bucket_size: int) -> list:
    averages = []

    def flush(bucket):
        flat = torch.cat([g.flatten() for g in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        parts = flat.split([g.numel() for g in bucket])
        averages.extend(part.view_as(g) for part, g in zip(parts, bucket))

    bucket, count = [], 0
    for gradient in gradients:
        bucket.append(gradient)
        count += gradient.numel()
        if count >= bucket_size:
            flush(bucket)
            bucket, count = [], 0
    flush(bucket)
    return averages


def bucketed_average_5(gradients: list, bucket_size: int) -> list:
    averages, bucket, count = [], [], 0
    for i, gradient in enumerate(gradients):
        bucket.append(gradient)
        count += gradient.numel()
        if count > bucket_size or i == len(gradients) - 1:
            flat = torch.cat([g.flatten() for g in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            parts = flat.split([g.numel() for g in bucket])
            averages += [part.view_as(g) for part, g in zip(parts, bucket)]
            bucket, count = [], 0
    return averages


def unequal_average_1(gradient: torch.Tensor, num_rows: int):
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


def unequal_average_2(gradient: torch.Tensor, num_rows: int):
    gradient = gradient * num_rows
    dist.all_reduce(gradient)
    return gradient / 10


def unequal_average_3(gradient: torch.Tensor, num_rows: int):
    total = torch.tensor(num_rows)
    dist.all_reduce(gradient)
    dist.all_reduce(total)
    return gradient / total


def unequal_average_4(gradient: torch.Tensor, num_rows: int):
    gradient = gradient * num_rows
    dist.all_reduce(gradient)
    dist.all_reduce(num_rows)
    return gradient / num_rows


WRONG = [
    ("average", new_tensors_under_the_name_of_the_loop, "the division is lost, as the loop's variable is rebound"),
    ("average", sums, "the division is missing"),
    ("average", changed_in_place, "returns nothing"),
    ("average", result_of_all_reduce, "all_reduce returns None"),
    ("average", divided_before_and_after, "divides twice"),
    ("average", divided_by_number_of_tensors, "divides by the number of tensors"),
    ("average", four_ranks_written_in, "the number of ranks is written in"),
    ("average", returns_inside_the_loop, "returns after the first gradient"),
    ("average", no_messages, "divides, but sends nothing"),
    ("average", only_rank_0_has_the_sum, "only rank 0 gets the sum"),
    ("average", never_waits, "reads before the messages are done"),
    ("bucketed_average", one_message_for_each, "one message for each gradient"),
    ("bucketed_average", one_bucket_for_all, "ignores the bucket size"),
    ("bucketed_average", bucket_counts_tensors, "counts tensors, not numbers"),
    ("bucketed_average", full_is_more_than_its_size, "a bucket of exact size waits"),
    ("bucketed_average", bucket_counts_rows, "counts rows, not numbers"),
    ("bucketed_average", last_bucket_stays, "the last bucket never travels"),
    ("bucketed_average", sends_before_it_is_full, "sends buckets before they are full"),
    ("bucketed_average", sums_in_buckets, "the division is missing"),
    ("bucketed_average", flat_averages, "the shapes are lost"),
    ("bucketed_average", from_the_last_to_the_first, "fills from the end of the list"),
    ("unequal_average", mean_of_the_means, "every rank counts the same"),
    ("unequal_average", ten_rows_written_in, "the number of rows is written in"),
    ("unequal_average", divided_by_own_rows, "divides by its own rows"),
    ("unequal_average", never_divided, "the division is missing"),
    ("unequal_average", divided_by_ranks_too, "divides by the ranks as well"),
    ("unequal_average", empty_ranks_stay_away, "empty ranks skip the all-reduce"),
    ("unequal_average", own_share_only, "the shares are never added"),
    ("unequal_average", mean_over_busy_ranks, "leaves out empty ranks, ignores rows"),
    ("average", average_1, "sum, not divided"),
    ("average", average_2, "returns what all_reduce returns"),
    ("average", average_3, "divides by the number of tensors"),
    ("average", average_4, "divides by 4 always"),
    ("bucketed_average", bucketed_average_1, "last, unfilled bucket never sent"),
    ("bucketed_average", bucketed_average_2, "sends before the bucket would overflow"),
    ("bucketed_average", bucketed_average_3, "counts tensors, not numbers"),
    ("bucketed_average", bucketed_average_4, "always flushes at end, even empty"),
    ("bucketed_average", bucketed_average_5, "full only when above bucket_size"),
    ("unequal_average", unequal_average_1, "plain mean over ranks"),
    ("unequal_average", unequal_average_2, "ten rows always"),
    ("unequal_average", unequal_average_3, "not weighted, divided by all rows"),
    ("unequal_average", unequal_average_4, "all_reduce of a Python int"),
]

RIGHT = [
    ("average", average_in_place),
    ("bucketed_average", bucketed_by_offsets),
    ("unequal_average", weighted_average),
]
