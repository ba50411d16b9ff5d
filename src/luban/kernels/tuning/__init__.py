"""Schedules that are measured instead of derived.

workload   what a schedule is for, as one line of text
kept       what a kernel's builder asks: the kept schedule of a workload, read and checked
rules      what a schedule must keep to be right, whatever its speed
spaces     the schedules near one, and which of them a cost model expects to be fast
programs   a workload as a program with operands, and its float64 reference
learned    what the measurements so far say of schedules that were not measured
search     measures, keeps the better half, looks around the best; `measured` is its log
tune       workloads in, entries of the user's table out
"""
