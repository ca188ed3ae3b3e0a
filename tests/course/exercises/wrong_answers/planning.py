"""Answers to the exercises on planning."""

import math


def per_gpu(num_parameters, t, p):
    return num_parameters / (t * p)


def all_shared_by_replicas(num_parameters, t, p, d, sharded_optimizer):
    return 18 * num_parameters / (t * p * d)


def always_sharded(num_parameters, t, p, d, sharded_optimizer):
    return per_gpu(num_parameters, t, p) * (6 + 12 / d)


def never_sharded(num_parameters, t, p, d, sharded_optimizer):
    return 18 * per_gpu(num_parameters, t, p)


def everything_sharded(num_parameters, t, p, d, sharded_optimizer):
    return 18 * per_gpu(num_parameters, t, p) / (d if sharded_optimizer else 1)


def gradients_sharded_too(num_parameters, t, p, d, sharded_optimizer):
    return per_gpu(num_parameters, t, p) * (2 + 16 / (d if sharded_optimizer else 1))


def condition_swapped(num_parameters, t, p, d, sharded_optimizer):
    return per_gpu(num_parameters, t, p) * (6 + 12 / (1 if sharded_optimizer else d))


def stages_forgotten(num_parameters, t, p, d, sharded_optimizer):
    return num_parameters / t * (6 + 12 / (d if sharded_optimizer else 1))


def gradients_of_2_bytes(num_parameters, t, p, d, sharded_optimizer):
    return per_gpu(num_parameters, t, p) * (4 + 12 / (d if sharded_optimizer else 1))


def for_all_gpus(num_parameters, t, p, d, sharded_optimizer):
    return num_parameters * d * (6 + 12 / (d if sharded_optimizer else 1))


def state_bytes_by_parts(num_parameters, t, p, d, sharded_optimizer):
    weights, gradients, optimizer = (num_parameters * size / t / p for size in (2, 4, 12))
    return weights + gradients + (optimizer / d if sharded_optimizer else optimizer)


def exact_gpus(billion_tokens, billion_parameters, days, teraflops, flops=8, seconds=24 * 3600):
    return flops * billion_tokens * 1e9 * billion_parameters * 1e9 / (teraflops * 1e12 * days * seconds)


def rounded_down(billion_tokens, billion_parameters, days, teraflops):
    return int(exact_gpus(billion_tokens, billion_parameters, days, teraflops))


def rounded_to_nearest(billion_tokens, billion_parameters, days, teraflops):
    return round(exact_gpus(billion_tokens, billion_parameters, days, teraflops))


def always_one_more(billion_tokens, billion_parameters, days, teraflops):
    return int(exact_gpus(billion_tokens, billion_parameters, days, teraflops)) + 1


def not_rounded(billion_tokens, billion_parameters, days, teraflops):
    return exact_gpus(billion_tokens, billion_parameters, days, teraflops)


def six_flops(billion_tokens, billion_parameters, days, teraflops):
    return math.ceil(exact_gpus(billion_tokens, billion_parameters, days, teraflops, flops=6))


def minutes_for_seconds(billion_tokens, billion_parameters, days, teraflops):
    return math.ceil(exact_gpus(billion_tokens, billion_parameters, days, teraflops, seconds=24 * 60))


def giga_for_tera(billion_tokens, billion_parameters, days, teraflops):
    return math.ceil(exact_gpus(billion_tokens, billion_parameters, days, teraflops / 1000))


def one_billion_forgotten(billion_tokens, billion_parameters, days, teraflops):
    return math.ceil(exact_gpus(billion_tokens, billion_parameters / 1e9, days, teraflops))


def days_multiply(billion_tokens, billion_parameters, days, teraflops):
    return math.ceil(exact_gpus(billion_tokens, billion_parameters, 1 / days, teraflops))


def gpus_in_small_numbers(billion_tokens, billion_parameters, days, teraflops):
    return math.ceil(8 * billion_tokens * billion_parameters * 1e6 / (teraflops * days * 86400))


def gpus_needed_1(billion_tokens: float, billion_parameters: float, days: float, teraflops: float) -> int:
    flops = 8 * billion_tokens * 1e9 * billion_parameters * 1e9
    return int(flops / (teraflops * 1e12 * days * 24 * 3600))


def gpus_needed_2(billion_tokens: float, billion_parameters: float, days: float, teraflops: float) -> int:
    flops = 6 * billion_tokens * 1e9 * billion_parameters * 1e9
    return math.ceil(flops / (teraflops * 1e12 * days * 86400))


def gpus_needed_3(billion_tokens: float, billion_parameters: float, days: float, teraflops: float) -> int:
    flops = 8 * billion_tokens * 1e9 * billion_parameters * 1e9
    return math.ceil(flops / (teraflops * 1e12 * days * 3600))


def state_bytes_1(num_parameters: float, t: int, p: int, d: int, sharded_optimizer: bool) -> float:
    optimizer = 12 / d if sharded_optimizer else 12
    return (2 + 2 + optimizer) * num_parameters / (t * p)


def state_bytes_2(num_parameters: float, t: int, p: int, d: int, sharded_optimizer: bool) -> float:
    total = (2 + 4 + 12) * num_parameters / (t * p)
    if sharded_optimizer:
        total /= d
    return total


def state_bytes_3(num_parameters: float, t: int, p: int, d: int, sharded_optimizer: bool) -> float:
    own = num_parameters / (t * p * d)
    return 18 * own


def restart_forgotten(failure_hours, interval_minutes, save_minutes, restart_minutes):
    lost = interval_minutes / 2 / (failure_hours * 60)
    return (1 - lost) / (1 + save_minutes / interval_minutes)


def a_whole_interval_lost(failure_hours, interval_minutes, save_minutes, restart_minutes):
    lost = (interval_minutes + restart_minutes) / (failure_hours * 60)
    return (1 - lost) / (1 + save_minutes / interval_minutes)


def nothing_done_twice(failure_hours, interval_minutes, save_minutes, restart_minutes):
    return (1 - restart_minutes / (failure_hours * 60)) * interval_minutes / (interval_minutes + save_minutes)


def saves_are_free(failure_hours, interval_minutes, save_minutes, restart_minutes):
    return 1 - (restart_minutes + interval_minutes / 2) / (failure_hours * 60)


def saves_over_the_interval(failure_hours, interval_minutes, save_minutes, restart_minutes):
    left = 1 - (restart_minutes + interval_minutes / 2) / (failure_hours * 60)
    return left * (1 - save_minutes / interval_minutes)


def hours_as_minutes(failure_hours, interval_minutes, save_minutes, restart_minutes):
    left = 1 - (restart_minutes + interval_minutes / 2) / failure_hours
    return left / (1 + save_minutes / interval_minutes)


def what_is_lost(failure_hours, interval_minutes, save_minutes, restart_minutes):
    return 1 - new_work_by_parts(failure_hours, interval_minutes, save_minutes, restart_minutes)


def in_percent(failure_hours, interval_minutes, save_minutes, restart_minutes):
    return 100 * new_work_by_parts(failure_hours, interval_minutes, save_minutes, restart_minutes)


def new_work_by_parts(failure_hours, interval_minutes, save_minutes, restart_minutes):
    per_minute = 1 / (60 * failure_hours)
    restarting, repeating = restart_minutes * per_minute, interval_minutes / 2 * per_minute
    return (1 - restarting - repeating) / (1 + save_minutes / interval_minutes)


def divided_among_stages(num_parameters, t, p, d, sharded_optimizer):
    return num_parameters / (t * p) * (6 + 12 / (p if sharded_optimizer else 1))


def cut_among_replicas(num_parameters, t, p, d, sharded_optimizer):
    return num_parameters / (t * d) * (6 + 12 / (d if sharded_optimizer else 1))


def state_bytes_anew_world(num_parameters, t, p, d, sharded_optimizer):
    world_size = t * p * d
    local_parameters = num_parameters / (t * p)
    weight_bytes, grad_bytes, optim_bytes = 2, 4, 12
    optimizer = local_parameters * optim_bytes
    if sharded_optimizer:
        optimizer /= world_size
    return local_parameters * (weight_bytes + grad_bytes) + optimizer


def state_bytes_anew_gb(num_parameters, t, p, d, sharded_optimizer):
    local = num_parameters / t / p
    total = 6 * local + 12 * local / (d if sharded_optimizer else 1)
    return total / 2**30


def gpus_needed_anew_node(billion_tokens, billion_parameters, days, teraflops):
    total_flops = 8 * billion_tokens * 1e9 * billion_parameters * 1e9
    flops_per_gpu = teraflops * 1e12 * days * 24 * 3600
    gpus = math.ceil(total_flops / flops_per_gpu)
    return math.ceil(gpus / 8) * 8


def new_work_anew_lost(failure_hours, interval_minutes, save_minutes, restart_minutes):
    m = failure_hours * 60.0
    saving = save_minutes / interval_minutes
    restarting = restart_minutes / m
    repeating = interval_minutes / (2 * m)
    return max(0.0, min(1.0, 1.0 - saving - restarting - repeating))


def new_work_anew_brackets(failure_hours, interval_minutes, save_minutes, restart_minutes):
    mtbf_minutes = failure_hours * 60
    lost_per_failure = (restart_minutes + interval_minutes) / 2
    efficiency = 1 - lost_per_failure / mtbf_minutes
    overhead = 1 + save_minutes / interval_minutes
    return efficiency / overhead


def new_work_anew_wm(failure_hours, interval_minutes, save_minutes, restart_minutes):
    mtbf = failure_hours * 60
    return (1 - (restart_minutes + interval_minutes / 2) / mtbf) / (1 + save_minutes / mtbf)


def optimizer_of_the_whole_model(num_parameters, t, p, d, sharded_optimizer):
    if sharded_optimizer:
        return 6 * num_parameters / (t * p) + 12 * num_parameters / d
    return 18 * num_parameters / (t * p)


WRONG = [
    ("state_bytes", all_shared_by_replicas, "divides everything by all GPUs"),
    ("state_bytes", always_sharded, "always shards the optimizer"),
    ("state_bytes", never_sharded, "never shards the optimizer"),
    ("state_bytes", everything_sharded, "shards weights and gradients too"),
    ("state_bytes", gradients_sharded_too, "shards the gradients too"),
    ("state_bytes", condition_swapped, "shards when it should not"),
    ("state_bytes", stages_forgotten, "forgets the pipeline stages"),
    ("state_bytes", gradients_of_2_bytes, "gradients have 4 bytes, not 2"),
    ("state_bytes", for_all_gpus, "bytes of all GPUs together"),
    ("gpus_needed", rounded_down, "rounds down: too few GPUs"),
    ("gpus_needed", rounded_to_nearest, "rounds to nearest: sometimes too few"),
    ("gpus_needed", always_one_more, "one GPU too many if exact"),
    ("gpus_needed", not_rounded, "a fraction of a GPU"),
    ("gpus_needed", six_flops, "forgets the second forward pass"),
    ("gpus_needed", minutes_for_seconds, "takes minutes for seconds"),
    ("gpus_needed", giga_for_tera, "tera is 1e12, not 1e9"),
    ("gpus_needed", one_billion_forgotten, "parameters are in billions too"),
    ("gpus_needed", days_multiply, "more days need fewer GPUs"),
    ("gpus_needed", gpus_needed_1, "rounds down"),
    ("gpus_needed", gpus_needed_2, "6 FLOPs, without recomputation"),
    ("gpus_needed", gpus_needed_3, "hours taken for days"),
    ("state_bytes", divided_among_stages, "the optimizer is divided by p, not by d"),
    ("state_bytes", cut_among_replicas, "the model is cut by d, not by p"),
    ("state_bytes", state_bytes_1, "ZeRO's 16 bytes, not 18"),
    ("state_bytes", state_bytes_2, "replicas divide everything"),
    ("state_bytes", state_bytes_3, "d divides even without sharding"),
    ("new_work", restart_forgotten, "the restart is forgotten"),
    ("new_work", a_whole_interval_lost, "a whole interval is lost at each failure"),
    ("new_work", nothing_done_twice, "work since the last save is forgotten"),
    ("new_work", saves_are_free, "saves take no time"),
    ("new_work", saves_over_the_interval, "saves are a share of T + w, not of T"),
    ("new_work", hours_as_minutes, "hours taken for minutes"),
    ("new_work", what_is_lost, "the share that is lost"),
    ("new_work", in_percent, "percent instead of a share"),
    ("state_bytes", state_bytes_anew_world, "optimizer divided by t p d"),
    ("state_bytes", state_bytes_anew_gb, "gibibytes"),
    ("gpus_needed", gpus_needed_anew_node, "whole nodes"),
    ("new_work", new_work_anew_lost, "losses added up"),
    ("new_work", new_work_anew_brackets, "half of the restart"),
    ("new_work", new_work_anew_wm, "saves over the time between failures"),
    ("state_bytes", optimizer_of_the_whole_model, "t p forgotten in the sharded optimizer"),
]

RIGHT = [
    ("state_bytes", state_bytes_by_parts),
    ("gpus_needed", gpus_in_small_numbers),
    ("new_work", new_work_by_parts),
]
