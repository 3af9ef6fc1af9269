-- Both engines: what text of a record or an output can smuggle in is taken out; tables scroll; figures get the marks that a pointer shows.
-- Without Quarto also what Quarto does itself, as far as the book uses it: numbered figures and tables, references to them, boxes.

local is_html = FORMAT:match("html") ~= nil
local harmless = { details = true, summary = true, br = true, sub = true, sup = true }

local function raw(element)
  local tag = element.format == "html" and element.text:match("^</?(%a+)[%w%s=\"-]*>$")
  if not (tag and harmless[tag:lower()]) or element.text:lower():match("%son%a+%s*=") then return {} end
end

local function calm(element)  -- no attribute is an event's script
  local kept = {}
  for name, value in pairs(element.attr.attributes) do
    if not name:lower():match("^on") then kept[#kept + 1] = { name, value } end
  end
  element.attr = pandoc.Attr(element.attr.identifier, element.attr.classes, kept)
  return element
end

local function local_path(target)
  return not target:match("^%a[%w+.-]*:") and not target:match("^[/\\]") and not target:match("%.%.")
end

local function link(element)
  local target = element.target
  if not is_html and (element.classes:includes("csv") or target:match("^runs/")) then return element.classes:includes("csv") and {} or element.content end
  if not (target:match("^https?://") or target:match("^#") or local_path(target)) then return element.content end
end

-- Circles that lsai_lab/kit/marks.py put into the SVG, over the picture: titles are shown, and lead to the run.
local function image(element)
  if not (element.src:match("^data:image/[psj][%w+]*;") or local_path(element.src)) then return pandoc.Emph("(picture left out)") end
  if not quarto then element.attributes.alt, element.attributes["fig-alt"] = element.attributes["fig-alt"], nil end
  local file = is_html and element.src:match("%.svg$") and io.open(element.src)
  if not file then return element end
  local svg, circles = file:read("a"), {}
  for x, y, run, title in svg:gmatch('<circle cx="([%d.]+)" cy="([%d.]+)" r="5" fill="none" data%-run="([%w%._/-]*)"><title>([^<>]*)</title>') do
    local circle = '<circle cx="' .. x .. '" cy="' .. y .. '" r="5"><title>' .. title .. "</title></circle>"
    circles[#circles + 1] = run == "" and circle or '<a tabindex="-1" href="runs/' .. run .. '.html">' .. circle .. "</a>"
  end
  local over = '<svg aria-hidden="true" viewBox="' .. (svg:match('viewBox="([%d%s.]+)"') or "") .. '">' .. table.concat(circles) .. "</svg>"
  return pandoc.Span({ element, pandoc.RawInline("html", #circles > 0 and over or "") }, { class = "marked" })
end

local function plain(block)  -- typst reads a cell that begins with "= 8" as a heading
  if block.content[1] and block.content[1].t == "Str" and block.content[1].text:match("^[=+-/]") then block.content:insert(1, pandoc.RawInline("typst", "#[]")) end
  return block
end

local function scrolling(element)
  for index, spec in ipairs(element.colspecs) do element.colspecs[index] = { spec[1], nil } end  -- as wide as the content
  if is_html then return pandoc.Div(element, pandoc.Attr("", { "table-box" }, { tabindex = "0", role = "region", ["aria-label"] = "table" })), false end
  return element:walk({ Plain = plain })
end

local words = { fig = "Figure", tbl = "Table", sec = "Section" }
local labels, numbers, counters = {}, {}, {}

local function header(element)
  if element.level == 1 then counters = { fig = 0, tbl = 0 } end
  numbers[element.level] = (numbers[element.level] or 0) + 1
  for level = element.level + 1, 6 do numbers[level] = 0 end
  labels[element.identifier] = (element.level == 1 and "Chapter" or "Section") .. "\u{a0}" .. table.concat(numbers, ".", 1, element.level)
end

local function float(div, kind)
  counters[kind] = (counters[kind] or 0) + 1
  labels[div.identifier] = words[kind] .. "\u{a0}" .. (numbers[1] or 0) .. "." .. counters[kind]
  local content = div.content:clone()
  local caption = #content > 1 and content[#content].t:match("^P[al]") and content:remove().content or pandoc.Inlines({})
  caption = pandoc.Inlines({ pandoc.Strong(labels[div.identifier] .. "."), pandoc.Space() }) .. caption
  if kind == "tbl" and not is_html and content[1].t == "Table" then
    content[1].caption, content[1].attr = { long = { pandoc.Plain(caption) } }, pandoc.Attr(div.identifier)
    return content
  end
  return pandoc.Figure(content, { pandoc.Plain(caption) }, pandoc.Attr(div.identifier, { kind == "tbl" and "table" or "image" }))
end

local function box(div)
  div.content = div.content:map(function(block) return block.t == "Header" and pandoc.Para({ pandoc.Strong(block.content) }) or block end)
  if is_html then return div end
  return pandoc.Blocks({ pandoc.RawBlock("typst", "#block(breakable: false, stroke: (left: 2pt + gray), inset: 8pt)["), div, pandoc.RawBlock("typst", "]") })
end

local function numbered(blocks)
  local out = pandoc.Blocks({})
  for _, block in ipairs(blocks) do
    if block.t == "Header" then header(block) end
    local kind = block.t == "Div" and block.identifier:match("^(%a+)%-")
    local made = block
    if kind == "fig" or kind == "tbl" then made = float(block, kind)
    elseif block.t == "Div" and (block.classes[1] or ""):match("^callout") then made = box(block) end
    if pandoc.utils.type(made) == "Blocks" then out:extend(made) else out:insert(made) end
  end
  return out
end

local references = {
  Cite = function(cite)
    local out = pandoc.Inlines({})
    for index, citation in ipairs(cite.citations) do
      if not words[citation.id:match("^(%a+)%-") or ""] then return nil end
      if index > 1 then out:extend({ pandoc.Str(","), pandoc.Space() }) end
      local name = labels[citation.id]
      out:insert(name and pandoc.Link(name, "#" .. citation.id) or pandoc.Emph(citation.id .. " (not measured here)"))
    end
    return out
  end,
}

function Pandoc(doc)
  doc = doc:walk({ Div = calm, Span = calm, Link = calm, Image = calm, Header = calm, Code = calm, CodeBlock = calm, Table = calm })
  doc = doc:walk({ RawBlock = raw, RawInline = raw, Link = link, Table = not is_html and scrolling or nil }):walk({ Image = image })
  if not quarto then
    doc.blocks = numbered(doc.blocks)
    doc = doc:walk(references)
    doc.blocks:extend({ pandoc.Header(1, "References", pandoc.Attr("references", { "unnumbered" })), pandoc.Div({}, pandoc.Attr("refs")) })
    if not is_html then doc.blocks:insert(1, pandoc.RawBlock("typst", "#outline(title: [Figures], target: figure.where(kind: image))")) end
    if is_html then doc.blocks = pandoc.Blocks({ pandoc.RawBlock("html", "<main>") }) .. doc.blocks .. { pandoc.RawBlock("html", "</main>") } end
  end
  return is_html and doc:walk({ traverse = "topdown", Table = scrolling }) or doc
end
