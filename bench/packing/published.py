"""FGD's published results on the five workloads, which the harness must reproduce before it may judge a policy.

Means over ten seeds (42 to 51) of percent of GPU in use after 100 % and 130 % of the capacity have arrived, from the
authors' `experiments/analysis/expected_results/analysis_allo_discrete.csv` (kubernetes-scheduler-simulator 8f3d6417).
"""

FGD = {
    "default": (95.23, 95.39),
    "cpu100": (95.21, 95.35),
    "gpushare40": (93.96, 94.15),
    "gpuspec20": (94.66, 94.84),
    "multigpu30": (96.36, 96.46),
}
SEEDS = range(42, 52)
ERROR_POINTS_MAX = 0.15
