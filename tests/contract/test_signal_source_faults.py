"""Sources of clouds whose metadata server misbehaves or lies.

They never raise an exception, and they recover.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from signal_clouds import DEADLINE, Fault, Provider, local_cloud, serve, source_of, until_trouble, within

PROVIDERS: tuple[Provider, ...] = ("eks", "gke", "aks")
pytestmark = pytest.mark.parametrize("provider", PROVIDERS)


async def weather_from_the_start(provider: Provider, fault: Fault, folder: Path) -> None:
    async with local_cloud(provider, folder) as cloud:
        await cloud.preempt()
        cloud.fault = fault
        answers = cloud.source.watch()
        first = asyncio.ensure_future(anext(answers))
        if not (provider == "aks" and fault is Fault.SILENT):  # its first answer may take two minutes
            await until_trouble(cloud.source, True)
        assert not first.done(), fault
        assert cloud.source.trouble is not None, fault
        assert "metadata server at http://127.0.0.1" in cloud.source.trouble, fault
        await cloud.repair()
        if not (provider == "aks" and fault is Fault.SILENT):
            (notice,) = await asyncio.wait_for(first, 30)
            assert notice.deadline == DEADLINE, fault
            await until_trouble(cloud.source, False)
        first.cancel()
        assert cloud.num_trapped == 0, fault


async def weather_while_a_notice_stands(provider: Provider, fault: Fault, folder: Path) -> None:
    async with local_cloud(provider, folder) as cloud:
        answers = cloud.source.watch()
        assert await within(30, answers) == ()
        await cloud.preempt()
        (notice,) = await within(30, answers)
        cloud.fault = fault
        again = asyncio.ensure_future(anext(answers))
        await until_trouble(cloud.source, True)
        assert not again.done(), f"{fault} is no cancellation"
        await cloud.repair()
        await until_trouble(cloud.source, False)
        assert not again.done(), f"{notice} is not announced twice after {fault}"
        await cloud.cancel()
        assert await asyncio.wait_for(again, 30) == (), fault


async def test_a_server_that_misbehaves_from_the_start_is_waited_for(provider: Provider, tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        for fault in Fault:
            tasks.create_task(weather_from_the_start(provider, fault, tmp_path / fault.name))


async def test_a_server_that_misbehaves_takes_no_notice_back(provider: Provider, tmp_path: Path) -> None:
    # With a token that is valid, EC2's 404 says that nothing is announced.
    faults = [fault for fault in Fault if (provider, fault) != ("eks", Fault.NOT_FOUND)]
    async with asyncio.TaskGroup() as tasks:
        for fault in faults:
            tasks.create_task(weather_while_a_notice_stands(provider, fault, tmp_path / fault.name))


async def test_an_absent_server_is_waited_for(provider: Provider, tmp_path: Path) -> None:
    url, runner = await serve(web.Application())
    await runner.cleanup()
    async with aiohttp.ClientSession() as session:
        source = source_of(provider, session, url)
        answers = source.watch()
        first = asyncio.ensure_future(anext(answers))
        await until_trouble(source, True)
        assert not first.done()
        first.cancel()
