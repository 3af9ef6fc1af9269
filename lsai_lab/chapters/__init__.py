"""What only chapters of the book use, as `lab.<name>`, and the Tab key does not offer: what single
ones compute from records, where it is more than a few lines, and what many of them say and draw.

Sentences:

    speed = lab.number(3.96, "{:.2f}x", run)    a number that the text has as [3.96x](#speed)
    say("...")                           a sentence with computed numbers
    run_link(text, run)                  a link to the page of a run
    parameters(name)                     the file params/<name>.yaml

Pictures:

    panels, loss_chart, stacked          several charts side by side; losses; stacked bars
    PALETTE, COLORS                      the report's colours
    thousands                            an axis in thousands
    GPU_COLORS, MARKERS, series_style(n) a GPU's colour; markers; colour and marker of series n
    number_map                           a table of numbers coloured by value
    two_lines                            a long name of a row, broken

Your machine:

    own_runs, own_counts, own_ends       your runs; how they ended, and why
    own_rates                            the rates of your machine
    or_nothing                           a table, or what will stand there where nothing ran
    own_ratios, own_chart                your ratios beside the recorded ones

Analysis, from frames to frames and numbers:

    over_repeats, spread                 one figure from repeats, and how far they scatter
    with_range                           a figure with the range of its repeats, as text
    with_cost                            energy and money for a billion tokens
    half_width                           half a 95% interval of differences, seed by seed
    text_read                            tokens of a run, distinct ones, passes over its text
    loss_changes, training_loss, loss_by_pass      training loss beside validation loss
    rounding_costs, cost_by_steps        what rounding weights costs, and when
    lost_updates                         which share of the updates it loses
    cost_by_pass, what_was_read          its cost in each pass over a text; how much was read
    SESSION_SPREAD                       closer speeds of one session are called equal
    session_differences                  how far equal work lies apart between sessions
    RATES, machine_rates, tokens_to_fill the measured roof of each GPU
    block_operations, least_times        operations of one block, and their least times
    layer_matmuls, square_matmuls        matmuls timed alone
    HEADS, attention_points, kernel_times, kernel_lead    what the attention bench measured; the
                                         lead of one kernel over the best other one
    attention_curves, window_times       rate and memory over the length; times with a window
    kernel_errors, rounding_error        errors against float64; that of one rounding
    kernels_declared                     the kernels as a table
    auto_shares                          how good the choices of `auto` are
    memory_terms, step_memory            what fills the memory, by formula; a simulated step's
    single_changes                       pairs of settings that differ in one property
    levers, gain_range, compile_pays     what each change gains; from which step compiling pays
    TensorTraffic                        the large tensors that eager operators read and write
    class_times, waterfall               a step's time by class of kernel, down to the ideal step
    fp8_gains, fp8_by_seed               the gain of fp8, and the change of loss, wherever measured
    matmul_rates, same_kernels           the matmuls of a step: their speed; whether two runs share
    ideal_of                             the least time that a run's step could take
    block_times, kept_inputs             matmuls of one block: their time, the inputs kept
    ALLOWED_ERROR                        a correct attention kernel's, over eager attention's

Claims:

    load_claims                          what is claimed

Predictions:

    run_predictions                      recorded runs beside their predictions
    tried_predictions                    configurations predicted first and measured afterwards
    prediction_table                     committed tables: what fits which GPU, published figures
    estimator_errors                     errors of this package and of others' formulas
    rival_table, SAMPLES                 others' programs beside this package, by what was asked
    prediction_errors, error_summary     errors by what was predicted and what tested it
    sorted_errors                        which share of them is no larger than each
    program_errors, published_errors     of other people's programs; of published figures
    compiled_program_errors              of other people's programs with whole models compiled
    plans_beside                         a plan beside the fastest of other settings
    plans_tried                          plans that ran with their budget as the limit
    verdicts, host_difference            whether a run fits; what two GPUs differ by
    what_fits, PARTS                     a model's techniques; the parts of its peak

Many nodes:

    scale_config, groupings              the assumptions; what each way to group the GPUs costs
    step_traffic                         what a step of FSDP sends
    recorded_node                        the assumptions with what one node measured
    best_groupings, enough_tokens        the best plans; from how many tokens the network is hidden
    group_size, checkpoint_costs         n*; how often to save, and what it costs
    loss_distance, changes_by_pair       of runs that round alike, what sharding does to the loss
    changes_in_words                     those changes in thousandths of a nat
    largest_models                       the largest model of each setting, and its bound
    sharded_peers, scaling_grid          Llama-3-8B beside torchtitan; the course's grid
    ways_measured                        ways of sharing a model, predicted and measured

How much to believe:

    speed_noise, one_setting             how far equal work is apart; one setting in all studies
    claims_with, all_claims              claims with a verdict, and all
    disturbed_runs, disturbed_marks      runs that others disturbed; claims that rest on them
    first_run_after                      how long after its bound a claim's first run began
    peer_comparisons, peer_settings      this package beside other trainers, and their settings
    published_speeds                     what others published for a model of 8 B
    peer_savings                         the leads beside what our kernels save

One sequence on several GPUs:

    context_points, shared_times         what was measured; of it the times on several GPUs
    against_one_gpu, crossovers          beside one GPU alone; from which length sharing pays
    METHODS, method_times, equal_work    methods' names and times; by how much equal work differs
    best_rate_claims, long_training      claims on the best rate; whole training steps
"""

# By the module that defines them.
NAMES = {
    "lsai_lab.report.studies": ("parameters",),
    "lsai_lab.report.show": ("run_link", "say"),
    "lsai_lab.report.numbers": ("number",),
    "lsai_lab.report.charts": (
        "loss_chart",
        "number_map",
        "panels",
        "stacked",
        "thousands",
        "two_lines",
    ),
    "lsai_lab.report.colors": ("COLORS", "GPU_COLORS", "PALETTE"),
    "lsai_lab.report.yours": (
        "own_runs",
        "or_nothing",
        "own_counts",
        "own_ends",
        "own_rates",
        "own_ratios",
        "own_chart",
    ),
    "lsai_lab.report.style": ("MARKERS", "series_style"),
    "lsai_lab.report.predicted": ("run_predictions", "prediction_table", "tried_predictions"),
    "lsai_lab.analysis.cost": ("with_cost",),
    "lsai_lab.analysis.summary": (
        "SESSION_SPREAD",
        "block_times",
        "kept_inputs",
        "over_repeats",
        "spread",
        "with_range",
    ),
    "lsai_lab.analysis.attention": (
        "HEADS",
        "attention_curves",
        "attention_points",
        "auto_shares",
        "kernel_errors",
        "kernel_lead",
        "kernel_times",
        "kernels_declared",
        "rounding_error",
        "window_times",
    ),
    "lsai_lab.analysis.roof": (
        "RATES",
        "block_operations",
        "layer_matmuls",
        "least_times",
        "machine_rates",
        "square_matmuls",
        "tokens_to_fill",
    ),
    "lsai_lab.analysis.techniques": ("memory_terms", "single_changes", "step_memory"),
    "lsai_lab.analysis.tensor_traffic": ("TensorTraffic",),
    "lsai_lab.analysis.step_time": (
        "class_times",
        "compile_pays",
        "gain_range",
        "ideal_of",
        "levers",
        "matmul_rates",
        "same_kernels",
        "waterfall",
    ),
    "lsai_lab.analysis.intervals": ("half_width",),
    "lsai_lab.analysis.losses": (
        "loss_by_pass",
        "loss_changes",
        "text_read",
        "training_loss",
    ),
    "lsai_lab.analysis.scale": (
        "best_groupings",
        "checkpoint_costs",
        "enough_tokens",
        "group_size",
        "groupings",
        "recorded_node",
        "scale_config",
        "step_traffic",
    ),
    "lsai_lab.chapters.context": (
        "METHODS",
        "against_one_gpu",
        "best_rate_claims",
        "context_points",
        "crossovers",
        "equal_work",
        "long_training",
        "method_times",
        "shared_times",
    ),
    "lsai_lab.chapters.fp8": ("fp8_by_seed", "fp8_gains"),
    "lsai_lab.chapters.noise": (
        "all_claims",
        "disturbed_marks",
        "disturbed_runs",
        "claims_with",
        "first_run_after",
        "one_setting",
        "session_differences",
        "speed_noise",
    ),
    "lsai_lab.analysis.peers": (
        "peer_comparisons",
        "peer_savings",
        "peer_settings",
        "published_speeds",
    ),
    "lsai_lab.chapters.predictions": (
        "PARTS",
        "error_summary",
        "host_difference",
        "plans_beside",
        "plans_tried",
        "prediction_errors",
        "published_errors",
        "sorted_errors",
        "verdicts",
        "what_fits",
    ),
    "lsai_lab.chapters.rounding": (
        "cost_by_pass",
        "cost_by_steps",
        "lost_updates",
        "rounding_costs",
        "what_was_read",
    ),
    "lsai_lab.chapters.sharding": (
        "largest_models",
        "changes_by_pair",
        "changes_in_words",
        "loss_distance",
        "scaling_grid",
        "sharded_peers",
    ),
    "lsai_lab.chapters.ways": ("ways_measured",),
    "lsai_lab.benches.attention.errors": ("ALLOWED_ERROR",),
    "lsai_lab.claims.declared": ("load_claims",),
    "lsai_lab.predictions.programs": ("compiled_program_errors", "program_errors"),
    "lsai_lab.predictions.recorded": ("estimator_errors",),
    "lsai_lab.predictions.rivals": ("SAMPLES", "rival_table"),
}
