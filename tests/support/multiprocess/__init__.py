"""Training in several processes, as on several hosts: CPU devices, gloo, `jax.distributed`.

    from tests.support.multiprocess.launcher import Call, run_job

    results = run_job({"run": Call("train", recipe="mixed_float16")}, processes=4, folder=tmp_path)

starts four workers with one device each, which together make one mesh, and returns what `train` of
`scenarios.py` returned in each of them. The same function called on a mesh of four devices of one
process is the reference. The parts:

* `launcher.py` starts processes and ends them: no job outlives its time limit or a lost process.
* `worker.py` is the process: it joins the job, runs the calls, and writes a JSON file.
* `scenarios.py` holds what is run, `models.py` the losses, data and shardings.

Which bits may be compared? Sums over devices are the only thing that depends on how devices are
spread over processes. One process adds them in the order of the devices. Gloo's all-reduce is a
ring, which adds each quarter of a buffer in another order (measured with float32 on four processes:
2310, 0321, 0132, 1203), and its reduce-scatter adds pairs, (0 + 1) + (2 + 3). Two terms have one
sum in any order, so two devices always agree to the last bit. For four, `models.hinge` has sums
that float32 holds exactly. float16 does not hold them: were gradients reduced in 16 bits, one and
four processes would train differently.
"""
