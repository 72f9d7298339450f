"""The benches that come with the lab: what each measures, and the module that has its ``main``."""

BENCHES = {
    "sim": ("A load on the controller's code, without a server.", "mmrt_lab.sim.command"),
    "goodput": ("Policies side by side, by goodput.", "mmrt_lab.goodput.command"),
    "autoscale": ("What more processes in bursts only save.", "mmrt_lab.planner.autoscale"),
    "profile": ("How long each stage works, for bench sim.", "mmrt_lab.sim.profile"),
    "bus": ("Bus, ring and pools beside ZeroMQ, queues and memcpy.", "mmrt_lab.micro.bus"),
    "runtime": ("What the runtime costs when a model computes nothing.", "mmrt_lab.micro.runtime"),
    "burst": ("A thousand requests at once beside streams.", "mmrt_lab.micro.burst"),
    "gateway": ("What gateway and page cost.", "mmrt_lab.micro.gateway"),
    "masks": ("What masks of grammars add to a decode step.", "mmrt_lab.micro.masks"),
    "experts": ("What the experts of a layer cost in a decode step.", "mmrt_lab.micro.experts"),
    "delta": ("What a DeltaNet costs in steps and prompts.", "mmrt_lab.micro.delta"),
    "cores": ("What a stage gains from cores that others leave idle.", "mmrt_lab.micro.cores"),
    "guesses": ("How much sooner answers come with guesses.", "mmrt_lab.micro.guesses"),
    "recorder": ("What the journal and the flight recorders cost.", "mmrt_lab.micro.recorder"),
    "controller": ("What a tick of the controller costs.", "mmrt_lab.controller"),
    "versus_transformers": ("Images at once beside transformers in sequence.", "mmrt_lab.versus_transformers"),
    "peers": ("Prefill and decode steps beside llama.cpp's.", "mmrt_lab.peers.command"),
    "accuracy": ("How far reduced precision is from float32.", "mmrt_lab.accuracy"),
    "media": ("Decoding beside PyAV, OpenCV and torchcodec.", "mmrt_lab.media.command"),
    "video": ("The first token of a long video beside its stages.", "mmrt_lab.media.video"),
}
